"""One model on one worker. Knows no HTTP, no Ray, no transfer and no other worker."""
