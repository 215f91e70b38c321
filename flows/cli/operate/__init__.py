"""Commands for operating a loop: feedback, labels, approval, the champion, regression suites, the live
page, triggers."""
