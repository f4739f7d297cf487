"""Reporting: logs and status files. It is handed plain values and reaches into nothing."""
