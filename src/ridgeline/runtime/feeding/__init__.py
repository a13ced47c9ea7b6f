"""Copies that overlap: batches stream to the device, results stream to the host, while it computes."""

from ridgeline.runtime.feeding.batches import FeedStream as FeedStream
from ridgeline.runtime.feeding.handover import Handover as Handover
from ridgeline.runtime.feeding.making import feed as feed
from ridgeline.runtime.feeding.report import CopyReport as CopyReport
from ridgeline.runtime.feeding.results import ToHost as ToHost
from ridgeline.runtime.feeding.results import to_host as to_host
