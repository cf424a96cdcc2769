"""What a config would mean on its cluster. No training run imports this unless it asks."""
