"""URLs of the project."""

from django.urls import path

from partner import views

urlpatterns = [path("go", views.go)]
