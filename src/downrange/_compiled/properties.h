/* The stored properties of a message: name, byte 1, value, byte 2 after each but maybe the last. */
#ifndef DOWNRANGE_PROPERTIES_H
#define DOWNRANGE_PROPERTIES_H

#include "steps.h"

/* A part of a message's properties; of size 0 when it is missing. */
typedef struct {
    int32_t at, size;
} Part;

/* Where those values stand that queue and index are made of: the last one of a name counts that is not empty. */
static inline void find_properties(const byte *start, Py_ssize_t whole, Part *tags, Part *unique_key, Part *keys) {
    const byte *at = start, *end = start + whole;
    *tags = *unique_key = *keys = (Part){0, 0};
    while (at < end) {
        const byte *stop = memchr(at, 2, (size_t)(end - at));
        Py_ssize_t size = (stop != NULL ? stop : end) - at, name = 0;
        Part *part = NULL;
        if (size >= 5 && !memcmp(at, "TAGS\x01", 5)) part = tags, name = 5;
        else if (size >= 5 && !memcmp(at, "KEYS\x01", 5)) part = keys, name = 5;
        else if (size >= 9 && !memcmp(at, "UNIQ_KEY\x01", 9)) part = unique_key, name = 9;
        if (part != NULL && size > name) *part = (Part){(int32_t)(at + name - start), (int32_t)(size - name)};
        at += size + 1;
    }
}

#endif
