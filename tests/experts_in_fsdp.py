"""For ``--experimental.custom_import``: FSDP takes experts that it need not take, as it did before it left them out."""

from titan_mxfp8.plugin.experts import RoutedExperts

RoutedExperts.needs_fsdp = "for comparison"
