"""One run, round by round, and the folder that it leaves. Nothing here knows where clients run or who watches."""
