"""What a run is: lineage, asks, events, costs; and its folder on disk."""
