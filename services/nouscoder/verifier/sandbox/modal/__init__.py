"""The backend whose runners are containers of Modal."""
