"""GradScaler and autocast: SCL."""
