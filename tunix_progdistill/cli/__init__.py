"""The command `tunix-progdistill`."""
