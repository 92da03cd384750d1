"""What verl loads (entry point ``verl.plugins``) in every process that imports verl: cheap."""

from coslice.integrations.verl import install

plugin = install()
