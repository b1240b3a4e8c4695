"""Which run this is, which attempt of it, what every tier holds of it, and what to resume from."""
