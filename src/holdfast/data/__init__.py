"""Data loaders that resume in the middle of an epoch, also on another number of ranks."""

from holdfast.data.elastic_loader import ElasticLoader
from holdfast.data.elastic_shards import ElasticShards, ShardReader
from holdfast.data.resumable import ResumableLoader
from holdfast.data.sampling import ResumableSampler

__all__ = ["ElasticLoader", "ElasticShards", "ResumableLoader", "ResumableSampler", "ShardReader"]
