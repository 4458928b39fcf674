"""What lies on the disk: the cache of finished results, the output folder, the log of a run, paths."""
