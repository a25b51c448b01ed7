"""The tuning loop, confirmation and what runs on top of them."""
