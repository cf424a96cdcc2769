"""Device code that several backends share, and how it is launched."""
