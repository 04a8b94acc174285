"""What one runs beside a training run or after it, each as `python -m tools.NAME`."""
