"""What the commands beside `plan` and `apply` do."""
