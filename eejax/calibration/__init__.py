"""Thresholds and routers fitted after training."""
