"""Copies that overlap: batches stream to the device, results stream to the host, while it computes."""

from ridgeline.feeding.batches import FeedStream as FeedStream
from ridgeline.feeding.handover import Handover as Handover
from ridgeline.feeding.making import feed as feed
from ridgeline.feeding.report import CopyReport as CopyReport
from ridgeline.feeding.results import ToHost as ToHost
from ridgeline.feeding.results import to_host as to_host
