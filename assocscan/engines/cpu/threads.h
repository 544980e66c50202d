// A few threads that run one function.
#pragma once
#include "scalar.h"

#include <pthread.h>

struct Worker {
    void (*body)(void*, i64);
    void* context;
    i64 index;
    pthread_t handle;
    bool started;
};

static void* thread_main(void* argument) {
    const Worker& worker = *(const Worker*)argument;
    worker.body(worker.context, worker.index);
    return nullptr;
}

// The stack of a worker thread; the default depends on the system (`ulimit -s`; 128 KiB in musl).
constexpr size_t STACK_BYTES = 1 << 20;

// Runs body(context, k) for every k < threads, each in a thread. The calling thread runs k = 0, and
// all k for which no thread can be started.
static void parallel(i64 threads, void (*body)(void*, i64), void* context, Worker* workers) {
    pthread_attr_t attributes;
    if (threads > 1) {
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, STACK_BYTES);
    }
    for (i64 k = 1; k < threads; ++k) {
        workers[k] = {body, context, k, {}, false};
        Worker& worker = workers[k];
        worker.started = pthread_create(&worker.handle, &attributes, thread_main, &worker) == 0;
    }
    body(context, 0);
    for (i64 k = 1; k < threads; ++k) {
        if (workers[k].started) pthread_join(workers[k].handle, nullptr);
        else body(context, k);
    }
    if (threads > 1) pthread_attr_destroy(&attributes);
}
