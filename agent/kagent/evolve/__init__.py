"""The loop: propose, build, check, measure, record."""
