"""A run of the command: its folder, its models, its data, its report."""
