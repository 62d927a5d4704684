"""Launchers: disposable processes that execute plans in memory that the judge owns."""
