// What every emulated kernel includes; compiled once.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "machine.h"

// Calls, not copies: half of the time to compile.
#define INLINE static inline
#define INLINE_MEMBER inline
