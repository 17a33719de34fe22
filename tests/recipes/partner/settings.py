"""Settings of the project; only what the recipe needs."""

import os

SECRET_KEY = "only-for-tests"
ALLOWED_HOSTS = ["*"]
INSTALLED_APPS = ["partner"]
ROOT_URLCONF = "partner.urls"
USE_TZ = True
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("DATABASE", "db.sqlite3")}
}
