"""How parameters get from files onto devices and back; `models.checkpoint` is the way in."""
