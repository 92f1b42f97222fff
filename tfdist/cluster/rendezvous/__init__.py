"""How the workers find one another: rank 0 serves, the others dial it."""
