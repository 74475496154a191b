"""How far a save or a restore is, and who watches."""
