"""What runs have recorded, side by side: as one HTML page, as pictures, or as a table on the terminal."""
