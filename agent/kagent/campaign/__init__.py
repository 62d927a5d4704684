"""Campaigns: one budget for several tasks, devices and seeds, spent where it gains the most."""
