/* The stored properties of a message: name, byte 1, value, byte 2 after each but maybe the last. The meaning is that of
   model/properties.py: a piece without a name or with an empty value is none; of several values of a name the last counts. */
#ifndef DOWNRANGE_PROPERTIES_H
#define DOWNRANGE_PROPERTIES_H

#include "steps.h"

/* Neither name nor value is empty. */
typedef struct {
    const byte *name, *value;
    Py_ssize_t name_size, value_size;
} Property;

/* The first property from `*at` on, which is moved behind it; 0 when there is none before `end`. */
static inline int next_property(const byte **at, const byte *end, Property *property) {
    while (*at < end) {
        const byte *name = *at, *stop = memchr(name, 2, (size_t)(end - name));
        *at = stop != NULL ? stop + 1 : end;
        if (stop == NULL) stop = end;
        const byte *middle = memchr(name, 1, (size_t)(stop - name));
        if (middle == NULL || middle == name || middle + 1 == stop) continue;
        *property = (Property){name, middle + 1, middle - name, stop - middle - 1};
        return 1;
    }
    return 0;
}

static inline int has_name(const Property *property, const void *name, Py_ssize_t size) {
    return property->name_size == size && memcmp(property->name, name, (size_t)size) == 0;
}

/* A part of a message's properties; of size 0 when it is missing. */
typedef struct {
    int32_t at, size;
} Part;

/* Where the values stand that queue and index are made of. */
static inline void find_properties(const byte *start, Py_ssize_t whole, Part *tags, Part *unique_key, Part *keys) {
    const byte *at = start;
    Property property;
    *tags = *unique_key = *keys = (Part){0, 0};
    while (next_property(&at, start + whole, &property)) {
        Part *part = has_name(&property, "TAGS", 4) ? tags
            : has_name(&property, "KEYS", 4) ? keys
            : has_name(&property, "UNIQ_KEY", 8) ? unique_key : NULL;
        if (part != NULL) *part = (Part){(int32_t)(property.value - start), (int32_t)property.value_size};
    }
}

/* Whether stored properties are text; 0 with an exception, too. */
static inline int is_utf8(const byte *at, Py_ssize_t size) {
    uint64_t eight;
    Py_ssize_t n = 0;
    for (; n + 8 <= size; n += 8) {
        memcpy(&eight, at + n, 8);
        if (eight & 0x8080808080808080u) break;
    }
    while (n < size && at[n] < 0x80) n++;
    if (n == size) return 1;
    PyObject *text = PyUnicode_DecodeUTF8((const char *)at, size, NULL);
    if (text == NULL && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
    Py_XDECREF(text);
    return text != NULL;
}

#endif
