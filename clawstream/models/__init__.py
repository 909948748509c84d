"""Getting models onto this machine. No torch here: conversion runs in a subprocess of the engine."""
