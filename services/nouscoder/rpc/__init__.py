"""gRPC plumbing: conversion, servers, channels."""
