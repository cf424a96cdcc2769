"""What a config would mean on its cluster, and flavors for studies. No training run imports this unless it asks."""
