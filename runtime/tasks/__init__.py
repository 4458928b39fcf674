"""What each task's outputs mean."""
