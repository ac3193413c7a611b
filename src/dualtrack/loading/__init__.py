"""The host and transfer path: pool, pooled loader, stream prefetcher, dual track."""
