"""What the loop in train.py leans on."""
