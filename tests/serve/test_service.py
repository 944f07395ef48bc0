"""probe"""
def test_info(service):
    print(service.get("/info").text)
