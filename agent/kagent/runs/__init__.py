"""What a run is: lineage, briefs, events, costs; and its folder on disk."""
