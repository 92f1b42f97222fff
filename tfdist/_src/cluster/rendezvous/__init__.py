"""The rendezvous of the workers: rank 0 listens, the others dial it."""
