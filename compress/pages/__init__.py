"""HTML pages that people read: one file each, without scripts, and without a request to anywhere."""
