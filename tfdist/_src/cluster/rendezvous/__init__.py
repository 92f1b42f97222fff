"""The rendezvous, by which workers find one another: rank 0 listens, the others dial it."""
