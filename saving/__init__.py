"""What a run keeps: its snapshots, whose they are, whether their contents fit, and where to find one."""
