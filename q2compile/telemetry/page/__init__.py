"""A telemetry folder's curves as one HTML page, with nothing to load from elsewhere."""
