// Things that the emulator has to refuse with a sentence
#pragma once

// Does what is named; returns 1 if the process is still there, 2 if there is no such name
int ask_for_refusal(const char* what);
