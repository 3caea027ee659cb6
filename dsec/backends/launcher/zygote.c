#include "launcher.h"

int zygote_main(void) { return 2; }
