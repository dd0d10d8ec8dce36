"""What people look at: the first screen, what was unusual, the progress bar, the command line."""
