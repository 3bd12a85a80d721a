"""What people and other programs read: scores as text, trajectories in other formats."""
