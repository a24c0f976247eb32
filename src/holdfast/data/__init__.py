"""Data loaders that resume in the middle of an epoch, also on another number of ranks."""

from holdfast.data.elastic_loader import ElasticLoader
from holdfast.data.elastic_shards import ElasticShards, ShardReader

__all__ = ["ElasticLoader", "ElasticShards", "ShardReader"]
