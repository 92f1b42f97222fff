"""What a schedule takes, computed or recorded, and pictures of it."""
