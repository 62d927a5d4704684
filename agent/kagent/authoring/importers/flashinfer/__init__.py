"""Definitions, workloads and solutions in the exchange format of FlashInfer-Bench."""
