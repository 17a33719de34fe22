"""The panel: each member with its answers, by question ID."""

from django.db import models


class PanelMember(models.Model):
    """A member of the panel."""

    code = models.CharField(max_length=64, primary_key=True)
    answers = models.JSONField(default=dict)

    def __str__(self) -> str:
        return f"PanelMember {self.pk}"
