"""Uploads of large files to S3 buckets that were begun and not finished, by processes that were killed.

S3 keeps the parts that have arrived, and charges for them, but lists no object.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from data.system.errors import one_line
from data.system.log import log

OLD = timedelta(days=1)  # longer than a file takes


def abort_uploads(
    client: Any, bucket: str, prefix: str, written: Collection[str], own: Callable[[str], bool] = lambda name: False
) -> int:
    """Abort unfinished uploads that no living process can need.

    These are the uploads of objects that the caller has just written, which nobody else may write, and of the caller's
    other objects, if they are older than a day. A store that refuses costs a warning only.

    Args:
        client: boto3's, of S3.
        bucket: its name.
        prefix: what the names of all objects begin with, with the slash; "" for the whole bucket.
        written: names of objects, without the prefix, that the caller has written to their ends.
        own: whether an object of this name, without the prefix, is the caller's.

    Returns:
        The number of uploads that were aborted.
    """
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    written, aborted, old = set(written), 0, datetime.now(UTC) - OLD
    try:
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
            for upload in page.get("Uploads", []):
                name = upload["Key"].removeprefix(prefix)
                if name in written or (own(name) and upload["Initiated"] < old):
                    client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                    aborted += 1
    except (Boto3Error, BotoCoreError, ClientError, OSError) as error:
        _warn(bucket, one_line(error))
    return aborted


@cache
def _warn(bucket: str, problem: str) -> None:
    """Warn, once per process, that uploads cannot be removed."""
    log.warning(
        f"s3://{bucket}: unfinished uploads of killed processes cannot be removed ({problem}); give the bucket a "
        "lifecycle rule that aborts them, or allow ListBucketMultipartUploads and AbortMultipartUpload"
    )
